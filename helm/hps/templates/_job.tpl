{{/* Common parts of the release's jobs, which send requests to servers and store nothing. */}}

{{- define "hps.job" -}}
restartPolicy: Never
serviceAccountName: {{ include "hps.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with include "hps.placement" (dict "root" .) | trim }}
{{ . }}
{{- end }}
volumes:
  - {name: tmp, emptyDir: {}}
  {{- if .Values.tls.enabled }}
  - name: tls
    secret: {secretName: {{ .Values.tls.existingSecret }}, defaultMode: 0440}
  {{- end }}
{{- end -}}

{{/* API key of the command line: takes root and key. */}}
{{- define "hps.job.env" -}}
- {name: HOME, value: /tmp}
{{- if .root.Values.auth.enabled }}
- name: HPS_API_KEY
  valueFrom: {secretKeyRef: {name: {{ include "hps.keysSecret" .root }}, key: {{ .key }}}}
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: HPS_TLS
  value: {{ include "hps.tls.tools" (dict "folder" "/tls" "mtls" .root.Values.tls.mtls) }}
{{- end }}
{{- end -}}

{{/* TLS of the command line: takes the certificates' folder, and mtls. */}}
{{- define "hps.tls.tools" -}}
ca={{ .folder }}/ca.crt{{ if .mtls }},certificate={{ .folder }}/tls.crt,key={{ .folder }}/tls.key{{ end }}
{{- end -}}

{{- define "hps.job.container" -}}
securityContext: {{- toYaml .Values.securityContext | nindent 2 }}
resources: {requests: {cpu: 50m, memory: 128Mi}, limits: {memory: 256Mi}}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- if .Values.tls.enabled }}
  - {name: tls, mountPath: /tls, readOnly: true}
  {{- end }}
{{- end -}}
